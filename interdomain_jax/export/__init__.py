"""Trained models as files for others: one `.safetensors` file, or the directory of a Hugging Face Llama."""

from interdomain_jax.export.llama_layout import read_exported, read_llama, write_llama
from interdomain_jax.export.safetensors_files import Loaded, load_model, save_model

__all__ = ["Loaded", "load_model", "read_exported", "read_llama", "save_model", "write_llama"]
