"""Sphinx configuration of the documentation site: ``make docs``."""

import pathlib

import torchgpmc

HERE = pathlib.Path(__file__).parent

project = "torchgpmc"
author = copyright = "torchgpmc developers"
version = release = torchgpmc.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_mathjax", "_templates"]
templates_path = ["_templates"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}  # autosummary writes the first kind

html_theme = "furo"
html_title = f"torchgpmc {release}"
html_static_path = [name for name in ("_mathjax",) if (HERE / name).is_dir()]
if html_static_path:  # put there by `make docs`, so that pages need no network
    mathjax_path = "tex-mml-chtml.js"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
# README and CHANGELOG link as the repository has them.
suppress_warnings = ["myst.xref_missing", "myst.header"]

nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autosummary_generate = True
autodoc_typehints = "none"  # docstrings give shapes and scales, which types do not
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    # scikit-learn's, whose texts refer to pages of its own
    "exclude-members": "set_fit_request, set_predict_request, set_score_request, get_metadata_routing",
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
