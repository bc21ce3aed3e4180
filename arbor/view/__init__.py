"""Views of a run: one HTML page without server or network, and the terminal."""

from arbor.view.page import (
    PageTrace,
    html_page,
    notebook_frame,
    page_trace_of,
    read_page_trace,
    refuse_other_file,
    write_page,
)
from arbor.view.picture import plain_text, search_picture

__all__ = [
    "PageTrace",
    "html_page",
    "notebook_frame",
    "page_trace_of",
    "plain_text",
    "read_page_trace",
    "refuse_other_file",
    "search_picture",
    "write_page",
]
