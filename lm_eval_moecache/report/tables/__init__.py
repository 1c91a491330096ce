"""Tables of runs, and the forms in which they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lm_eval_moecache.report.tables.leaderboard import Table
from lm_eval_moecache.report.tables.page import as_html
from lm_eval_moecache.report.tables.text import as_csv, as_json, as_markdown

FORMS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}
