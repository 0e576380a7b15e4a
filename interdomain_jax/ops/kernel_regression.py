"""The derivation behind the layer: attention as kernel regression, computed from Legendre coefficients of its past.

The layer in `interdomain.py` is a learned relaxation of what is here (the article's sections 3.1-3.2, equations 8
and 9); nothing here is learned, and no model uses it. Causal attention is the regression

    o_t = sum_n K(q_t, k_n) v_n / sum_n K(q_t, k_n),    n = 1..t

1. `fourier_features` turn the kernel into a product, K(q, k) ~ xi(q)^T xi(k).
2. Key features, values and the constant 1 are functions of time: token n is held over (n-1, n]. `legs_step` keeps the
   first M coefficients of each on the orthonormal Legendre functions of [0, t],

       u_m = 1/t int_0^t xi(k(s)) phi_m(s/t) ds    gamma_m: the same of v    eta_m: the same of 1
       phi_m(x) = sqrt(2m+1) P_m(2x - 1)

3. `kernel_regression` reads them: by Parseval's identity the two sums over tokens are, for M without bound, t times

       sum_m (xi(q)^T u_m) gamma_m    and    sum_m (xi(q)^T u_m) eta_m

eta is the first unit vector, so the denominator is exact at every M. What the numerator lacks is the product of two
remainders: the integral of (a - its projection) (v - its projection), for a(s) = xi(q_t)^T xi(k(s)).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from interdomain_jax.array_types import Output, Queries, Values


def draw_frequencies(key: Array, *, features: int, width: int, bandwidth: float) -> Float[Array, "F d"]:
    """Frequencies of the Gaussian kernel `exp(-|q - k|^2 / (2 bandwidth^2))`: normal, of deviation 1 / bandwidth.

    The normal density is the kernel's spectral density (Bochner's theorem; Rahimi and Recht, 2007).

    Args:
        key: a PRNG key.
        features: R, the number of features to be made from them, two by frequency.
        width: d, the width of queries and keys.
        bandwidth: in the units of queries and keys.

    Returns:
        [R / 2, d], in JAX's default float dtype.

    Raises:
        ValueError: `features` odd or below 2, `width` below 1, or `bandwidth` not positive.
    """
    if features < 2 or features % 2:
        raise ValueError(f"features must be even and at least 2, a cosine and a sine by frequency; got {features}.")
    if width < 1:
        raise ValueError(f"width must be at least 1; got {width}.")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive; got {bandwidth}.")
    return jax.random.normal(key, (features // 2, width)) / bandwidth


def fourier_features(x: Float[Array, "*batch d"], frequencies: Float[Array, "F d"]) -> Float[Array, "*batch R"]:
    """xi(x) = [cos(w^T x), sin(w^T x)] sqrt(2 / R) over the R / 2 frequencies w (the article's section 3.1).

    xi(q)^T xi(k) is the mean of cos(w^T (q - k)), whose expectation is the kernel K; its root mean square error is
    (1 - K(q, k)^2) / sqrt(R). xi has norm 1.

    Args:
        x: [..., d] queries or keys.
        frequencies: [R / 2, d], from `draw_frequencies`.

    Returns:
        [..., R], in float32 at least.

    Raises:
        ValueError: the widths differ.
    """
    if frequencies.ndim != 2 or not x.ndim or x.shape[-1] != frequencies.shape[1]:
        raise ValueError(f"x [..., d] and frequencies [F, d] must agree; got shapes {x.shape} and {frequencies.shape}.")
    dtype = jnp.promote_types(jnp.result_type(x, frequencies), jnp.float32)
    phase = jnp.einsum("...d,fd->...f", x.astype(dtype), frequencies.astype(dtype), precision="highest")
    return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1) / np.sqrt(len(frequencies))


def legs_change(tokens: Array | int, order: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "M M"]:
    """E_t - I, where E_t = exp(-A log((t+1) / t)) takes a function's coefficients on [0, t] to those on [0, t+1].

    The function is zero over the new token: E_t is the exact solution of HiPPO-LegS, dc/dt = (B f - A c) / t, without
    input (Gu, Dao, Ermon, Rudra and Re, 2020). Its entries are the products of the two bases, with r = t / (t+1),

        E_t[n, m] = r int_0^1 phi_n(r x) phi_m(x) dx,

    integrals of polynomials of degree below 2M, which M Gauss-Legendre points give exactly. E_t is a contraction, so no
    step makes rounding errors grow. But it nears I as 1 / t, and float32 would lose the difference. Hence

        E_t - I = r int_0^1 (phi_n(r x) - phi_n(x)) phi_m(x) dx - I / (t+1),

    with the difference of the two values from a recurrence of its own.

    Args:
        tokens: t, a whole number and a scalar; E_0 = 0, for there is nothing to keep.
        order: M.
        dtype: of the result.

    Returns:
        [M, M], lower triangular: no coefficient depends on later ones, so that those kept are exact at any M.
    """
    nodes, weights = np.polynomial.legendre.leggauss(order)
    legendre = np.polynomial.legendre.legvander(nodes, order - 1)
    norms = np.sqrt(2 * np.arange(order) + 1)
    projection = legendre * norms * weights[:, None] / 2
    tokens = jnp.asarray(tokens, dtype)
    # As an argument x of P_n, in [-1, 1], each node moves to x + shift; most near 1, at the newest tokens.
    shift = -jnp.asarray(nodes + 1, dtype) / (tokens + 1)
    below_one = jnp.asarray(nodes - 1, dtype) + shift

    # change = P_n(x + shift) - P_n(x), and its increment from n to n + 1. The three-term recurrence in the form
    # P_{n+1} - P_n = (n (P_n - P_{n-1}) + (2n+1) (x - 1) P_n) / (n+1) loses no digits near x = 1, where it matters;
    # written at x + shift, less the same at x:
    def recurrence(carry: tuple[Array, Array], term: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (change, increment), (n, value) = carry, term
        increment = (n * increment + (2 * n + 1) * (below_one * change + shift * value)) / (n + 1)
        return (change + increment, increment), change

    zeros = jnp.zeros(order, dtype)
    terms = (jnp.arange(order, dtype=dtype), jnp.asarray(legendre.T, dtype))
    _, changes = jax.lax.scan(recurrence, (zeros, zeros), terms)
    changes = jnp.asarray(norms, dtype)[:, None] * changes
    products = jnp.tril(jnp.matmul(changes, jnp.asarray(projection, dtype), precision="highest"))
    return (tokens * products - jnp.eye(order, dtype=dtype)) / (tokens + 1)


def legs_step(
    coefficients: Float[Array, "*batch M C"], inputs: Float[Array, "*batch C"], tokens: Array | int
) -> Float[Array, "*batch M C"]:
    """The coefficients after one more token, held over (t, t+1]: c <- c + (E_t - I) (c - e_0 f).

    e_0 f are the coefficients of a constant f, which the step leaves as they are, to the last bit.

    Args:
        coefficients: [..., M, C] after t tokens; zeros before the first.
        inputs: [..., C], f, the channels of token t + 1.
        tokens: t, a scalar.

    Returns:
        [..., M, C], in the dtype of `coefficients`.
    """
    order = coefficients.shape[-2]
    constant = jnp.eye(order, 1, dtype=coefficients.dtype) * inputs[..., None, :]
    change = legs_change(tokens, order, coefficients.dtype)
    return coefficients + jnp.einsum("nm,...mc->...nc", change, coefficients - constant, precision="highest")


def kernel_regression(q: Queries, k: Queries, v: Values, *, order: int) -> Output:
    """Causal kernel regression from M Legendre coefficients of the past (the article's equation 9):

        o_t = sum_m (xi(q_t)^T u_m) gamma_m / sum_m (xi(q_t)^T u_m) eta_m

    u, gamma and eta are the channels [xi(k), v, 1] of one recurrence, updated by `legs_step`; only the last are kept.
    With M = 1 this is the mean of the past values. It converges to attention with the kernel xi(q)^T xi(k), fast where
    keys and values are smooth in time. But held tokens are a staircase, which a polynomial follows only when its degree
    exceeds the number of steps. Until then an error stays in the mean of K v: 1/12 of the mean product of K's and v's
    changes from one token to the next. Sampled twice as finely, the same curves have a quarter of it.

    Args:
        q: [B, T, H, R] query features xi(q), from `fourier_features` or any other map.
        k: [B, T, H, R] key features xi(k).
        v: [B, T, H, D] values.
        order: M, the coefficients kept.

    Returns:
        [B, T, H, D], in the dtype of v; the coefficients are float32 at least. A query so far from every key that the
        error of the features outweighs the kernel has a denominator of either sign and no meaning.

    Raises:
        ValueError: shapes that do not agree, or an order below 1.
    """
    if q.ndim != 4 or q.shape != k.shape or v.ndim != 4 or k.shape[:3] != v.shape[:3] or 0 in (*k.shape, *v.shape):
        raise ValueError(
            "q and k must be [B, T, H, R] of one shape and v [B, T, H, D], every size at least 1; "
            f"got {q.shape}, {k.shape} and {v.shape}."
        )
    if order < 1:
        raise ValueError(f"order must be at least 1, the number of coefficients kept; got {order}.")
    batch, length, heads, features = k.shape
    dtype = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    channels = jnp.concatenate([x.astype(dtype) for x in (k, v, jnp.ones_like(v[..., :1]))], axis=-1)

    def step(coefficients: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        tokens, query, inputs = token
        coefficients = legs_step(coefficients, inputs, tokens)
        u, gamma_eta = jnp.split(coefficients, [features], axis=-1)
        scores = jnp.einsum("bhr,bhmr->bhm", query, u, precision="highest")
        sums = jnp.einsum("bhm,bhmd->bhd", scores, gamma_eta, precision="highest")
        return coefficients, sums[..., :-1] / sums[..., -1:]

    by_token = (jnp.arange(length), jnp.moveaxis(q.astype(dtype), 1, 0), jnp.moveaxis(channels, 1, 0))
    nothing = jnp.zeros((batch, heads, order, channels.shape[-1]), dtype)
    _, out = jax.lax.scan(step, nothing, by_token)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype)
