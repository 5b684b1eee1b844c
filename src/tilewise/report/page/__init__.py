"""A schedule as one HTML page: no network, no script needed to read it."""

from tilewise.report.page.assemble import page
from tilewise.report.page.document import DocumentError

__all__ = ["DocumentError", "page"]
