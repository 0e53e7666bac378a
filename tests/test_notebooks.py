"""Notebooks run, and what is kept in them is what they compute today.

Numbers and words of the text outputs are compared. Of pictures only the presence is:
their bytes change with fonts and versions of matplotlib.
"""

import os
import re

import pytest
from paths import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for needed in ("ipykernel", "matplotlib"):
    pytest.importorskip(needed)

NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b)")


def _execute(notebook):
    """Puts outputs of now into the notebook; raises at the first cell that fails."""
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}
    )
    backend = "module://matplotlib_inline.backend_inline"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": backend}
    return client.execute(env=env)


def _kinds(cell) -> list[str]:
    """What a cell shows: text, pictures, errors; warnings on stderr don't count."""
    kinds = set()
    for output in cell.outputs:
        if output.output_type == "stream":
            kinds |= {"stdout"} & {output.name}
        elif output.output_type == "error":
            kinds.add("error")
        else:
            kinds |= {kind for kind, data in output.data.items() if data}
    return sorted(kinds)


def _text(cell) -> str:
    streams = [o for o in cell.outputs if o.get("name") == "stdout"]
    results = [o for o in cell.outputs if o.output_type == "execute_result"]
    texts = [o.text for o in streams] + [o.data.get("text/plain", "") for o in results]
    return "".join(texts)


def differences(kept, now) -> list[str]:
    """Where the outputs of two code cells differ, in words."""
    if _kinds(kept) != _kinds(now):
        return [f"shows {_kinds(kept)}, should show {_kinds(now)}"]
    # Signs and spaces of a number go with it: -0.0 and 0.0 are the same number.
    words = ["".join(NUMBER.sub("#", _text(cell)).split()) for cell in (kept, now)]
    if words[0] != words[1]:
        return [f"says {_text(kept)!r}, should say {_text(now)!r}"]
    pairs = zip(*(NUMBER.findall(_text(cell)) for cell in (kept, now)), strict=True)
    return [
        f"has {before}, should have {after}"
        for before, after in pairs
        # A little above 1e-4, the difference of one in the fourth decimal.
        if float(before) != pytest.approx(float(after), 1e-4, 1.01e-4, nan_ok=True)
    ]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_its_kept_outputs_are_those_of_now(path):
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    now = _execute(nbformat.from_dict(kept))
    assert any("image/png" in _kinds(c) for c in now.cells if c.cell_type == "code")
    stale = [
        f"cell {i} {difference}"
        for i, (before, after) in enumerate(zip(kept.cells, now.cells, strict=True))
        if after.cell_type == "code"
        for difference in differences(before, after)
    ]
    assert not stale, "\n".join([f"{path.name} is stale, run it and save it:", *stale])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_small_and_knows_nothing_of_the_machine_it_ran_on(path):
    text = path.read_text()
    assert len(text) < 600_000
    for place in (str(ROOT), "/home/", "/root/", "/Users/"):
        assert place not in text
    notebook = nbformat.reads(text, as_version=4)
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "colab"}
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "%pip install" in code[0].source
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def _printed(text):
    stream = nbformat.v4.new_output("stream", name="stdout", text=text)
    return nbformat.v4.new_code_cell(outputs=[stream])


def test_what_counts_as_stale():
    kept = _printed("loss 0.0515 of\n 34 tokens")
    assert not differences(kept, _printed("loss 0.0516 of 34 tokens"))
    assert differences(kept, _printed("loss 0.0517 of 34 tokens"))
    assert differences(kept, _printed("loss 0.0515 of 35 tokens"))
    assert differences(kept, _printed("cost 0.0515 of 34 tokens"))
    assert differences(kept, _printed("loss nan of 34 tokens"))
    assert differences(kept, nbformat.v4.new_code_cell())
    assert not differences(_printed("0.0 nan"), _printed("-0.0  nan"))
