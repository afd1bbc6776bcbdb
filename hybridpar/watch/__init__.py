"""The dashboard of a run: one page about a run folder, live from loopback or as a file.

tail.py     files of lines that grow, read on from where they were, and curves of bounded length
board.py    all that the page shows, from the run folder alone
page.html   the page: no other file, nothing from elsewhere
serve.py    that page and its data over HTTP on 127.0.0.1
"""

from hybridpar.watch.board import Board
from hybridpar.watch.serve import page, serve

__all__ = ["Board", "page", "serve"]
