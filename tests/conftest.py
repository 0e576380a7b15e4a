"""Settings that every test runs under."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis

hypothesis.settings.register_profile("default", max_examples=15, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
