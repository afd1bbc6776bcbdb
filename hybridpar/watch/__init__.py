"""The dashboard of a run: one page about a run folder, live on this machine or as a file.

tail.py     growing files of lines, read from where the last look ended, and curves of bounded
length
board.py    all that the page shows, from the run folder alone
page.html   the page; it needs no other file and loads nothing from elsewhere
serve.py    the page and its data over HTTP on 127.0.0.1
"""

from hybridpar.watch.board import Board
from hybridpar.watch.serve import page, serve

__all__ = ["Board", "page", "serve"]
