"""Run `lm_eval run ...` with our models and tasks known: the way without a start-up hook."""

from __future__ import annotations

import sys

from lm_eval_moecache.paths import task_configs_dir


def run_raw(argv: list[str]) -> int:
    """Hand everything to lm-eval; our task folder is added unless the user names one."""
    from lm_eval.__main__ import cli_evaluate

    from lm_eval_moecache.plugin import register

    register()
    arguments = list(argv)
    if not any(a.split("=")[0] == "--include_path" for a in arguments):
        arguments += ["--include_path", str(task_configs_dir())]
    if not any(a.split("=")[0] in ("--model", "-M", "-h", "--help") for a in arguments):
        arguments += ["--model", "moecache"]
    sys.argv = ["lm_eval", "run", *arguments]
    cli_evaluate()
    return 0
