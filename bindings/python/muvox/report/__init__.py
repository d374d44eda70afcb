"""A report of a scan and a trained network: one HTML page that needs no network connection.

`collect` predicts and measures, `render` makes HTML of it, `browser.photograph` a picture of the page.
"""

from .contents import Contents, Map, collect
from .page import LIMIT, render

__all__ = ["LIMIT", "Contents", "Map", "collect", "render"]
