"""The contract of the op, run for each implementation, and what each has of its own."""

from tests.ops.contract import ImplementationContract


class TestSequential(ImplementationContract):
    implementation = "sequential"


class TestAssociative(ImplementationContract):
    implementation = "associative"
    longest = 40


class TestFFT(ImplementationContract):
    implementation = "fft"
    leak = 1e-6
    packs = False


class TestXLA(ImplementationContract):
    implementation = "xla"
    chunked = True


class TestPallasTPU(ImplementationContract):
    implementation = "pallas_tpu"
    chunked = True
    contracts = False
    far = 2**13


class TestPallasGPU(ImplementationContract):
    implementation = "pallas_gpu"
    chunked = True
    contracts = False
    far = 2**13
