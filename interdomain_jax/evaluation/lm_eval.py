"""The command line of lm-evaluation-harness, with the model "interdomain" among its own.

    python -m interdomain_jax.evaluation.lm_eval --model interdomain --model_args workdir=runs/tiny \
        --tasks lambada_openai --batch_size 32

The harness has no way to find models that other packages bring, so that its command `lm_eval` does not know this one.
"""

from lm_eval.__main__ import cli_evaluate

from interdomain_jax.evaluation import harness  # noqa: F401  (registers the model)

if __name__ == "__main__":
    cli_evaluate()
