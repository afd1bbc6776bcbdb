"""The command line: hybridpar train | verify | conform | check | memory | profile | plan | simulate
| graph | place | preprocess | generate | export | import | watch | doctor.

    hybridpar train CONFIG.toml --parallel.tp 2 --train.num_steps 100       alone, or under torchrun
    python -m hybridpar train ...                                          the same

A TOML file comes over the defaults and flags over the file. Exit codes: 0 fine; 1 it failed, or
verify found a difference; 2 the command line is wrong; 128 + n stopped by signal n, after saving
(130: Ctrl-C, 143: SIGTERM). `--json` prints one JSON object on stdout; everything else that a
command says goes to stderr then.
"""

import sys
from collections.abc import Sequence

from hybridpar.cli.shortage import describe, is_shortage


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as the `hybridpar` script does, and return the exit code.

    Ctrl-C ends the command, in most cases without a message.
    """
    try:
        # the import takes a moment, in which the user may press Ctrl-C
        from hybridpar.cli.entry import main as run

        return run(argv)
    except KeyboardInterrupt:
        if (sys.argv[1:] if argv is None else argv)[:1] == ["train"]:
            print(
                "hybridpar: SIGINT: ended outside of training, with nothing to save",
                file=sys.stderr,
                flush=True,
            )
        return 130
    except Exception as error:
        if not is_shortage(error):
            raise
        print(f"hybridpar: {describe(error, 'this command')}", file=sys.stderr, flush=True)
        return 1
