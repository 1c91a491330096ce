"""How lm-eval finds our models by name, without a flag and without importing torch early.

lm-eval releases after 0.4.13 read the entry-point group `lm_eval.models` (pyproject.toml), and
nothing here is needed. lm-eval 0.4.13 reads none, so the wheel puts three small files into
site-packages: `lm_eval_moecache.pth` and its PEP 829 twin `lm_eval_moecache.start` both call
`lm_eval_moecache_startup.arm()`, which waits for the import of `lm_eval.models` and then calls
`register()` here. The import of `lm_eval.evaluator` on the way is when a command line that names
our models is checked. `moecache eval` does both itself and needs no start-up file.

What is fragile:
- Order. lm-eval fills its registry only if it is empty, so registering before `lm_eval.models`
  has run would leave `--model hf` unknown. Hence the import hook, and the import in `register()`.
- The placeholder must be a *string*: `@register_model` lets a class replace the string that names
  it, but rejects an `EntryPoint` placeholder as a clash. Undecorated classes work with both.
- Standing down rests on one name: releases that scan have `lm_eval.api.registry.load_plugins`.
  Should it be renamed, ours is registered first and the scan skips registered names.
- Python 3.18 stops executing import lines in `.pth` files; `.start` takes over from 3.15 on. Both
  are skipped by `python -S`, and by `pip install --target` folders that are only on PYTHONPATH.
- Security scanners look at `.pth` files. Deleting all three files is safe; use `moecache eval`.
- In an editable install the three files are copies: reinstall after changing `startup/`.
"""

SPECULATIVE = "moecache-spec"
MODELS = {
    "moecache": "lm_eval_moecache.harness.lm:MoECacheLM",
    SPECULATIVE: "lm_eval_moecache.harness.lm:MoECacheSpecLM",
}


def register() -> None:
    """Add our models to lm-eval's registry as lazy placeholders, unless lm-eval finds them itself.

    Imports neither torch nor our model classes. Safe to call twice.
    """
    import lm_eval.models  # noqa: F401  # first: see "Order" above
    from lm_eval.api import registry

    if hasattr(registry, "load_plugins"):
        return
    for name, target in MODELS.items():
        if name not in registry.model_registry:
            registry.model_registry.register(name, target=target)
