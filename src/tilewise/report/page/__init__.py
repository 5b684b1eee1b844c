"""A schedule as one HTML page, which needs no network and can be read without its script."""

from tilewise.report.page.assemble import page
from tilewise.report.page.document import DocumentError

__all__ = ["DocumentError", "page"]
