"""`moecache` and `python -m lm_eval_moecache`. An interrupt while Python imports is told as one."""

import sys


def main() -> int:
    """Run the command of `cli.main`, whose imports take half a second and more."""
    try:
        from lm_eval_moecache.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("moecache: interrupted. Nothing was begun.\n")
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
