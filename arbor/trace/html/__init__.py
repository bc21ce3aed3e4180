"""Runs as one HTML file that needs no server and no network: the page's assets and what fills them."""

from arbor.trace.html.page import html_page, notebook_frame, write_page
from arbor.trace.html.recording import Recording, read_recording, record_events

__all__ = [
    "Recording",
    "html_page",
    "notebook_frame",
    "read_recording",
    "record_events",
    "write_page",
]
