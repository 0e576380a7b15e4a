"""How Sphinx builds these pages: `make docs`."""

from interdomain_jax.version import __version__

project = "Interdomain Attention in JAX"
author = "the authors of interdomain-jax"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", *(f"sphinx.ext.{name}" for name in ("autodoc", "autosummary", "napoleon", "viewcode"))]
html_theme = "furo"
html_title = project

# The pages are read on the hosting site too, where every heading has an anchor.
myst_heading_anchors = 3
# Quoted values are to be copied as they are.
smartquotes = False
# Single backticks in docstrings are code, as in the pages.
default_role = "code"
# Attributes of several classes have one name; napoleon looks for the first of them.
suppress_warnings = ["ref.python"]
autodoc_member_order = "bysource"
autosummary_generate = False
# Shapes and dtypes are in the docstrings; the aliases that signatures have are longer than what they stand for.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
