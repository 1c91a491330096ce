"""`moecache` and `python -m lm_eval_moecache`; Ctrl-C during imports ends without a traceback."""

import sys


def main() -> int:
    """Run the command line of `cli.main`, whose imports take half a second or more."""
    try:
        from lm_eval_moecache.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("moecache: interrupted. Nothing was begun.\n")
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
