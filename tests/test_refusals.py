"""`qwen-train` refuses what it can before torch is loaded: in less than a second of CPU time.

`tools/bench_refusals.py` measures each; here they run one after the other in one process, which must not load torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .support.commands import HEAVY
from .support.paths import load_tool
from .support.runs import Trainer

REFUSED = """
import contextlib, io, json, sys
from qwen_train.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    print(json.dumps([said.getvalue(), sorted({*json.loads(sys.argv[0])} & sys.modules.keys())]))
"""


def test_refusals_load_no_torch(train: Trainer, tmp_path: Path) -> None:
    out = train(train__max_steps=1)
    tool: Any = load_tool("bench_refusals")
    commands = tool.refusals(str(train.cache), str(train.model), str(out))
    program = REFUSED.replace("json.loads(sys.argv[0])", repr(HEAVY))
    arguments = [sys.executable, "-c", program, json.dumps(list(commands.values()))]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, line in zip(commands, done.stdout.splitlines(), strict=True):
        said, loaded = json.loads(line)
        assert said.startswith("error: "), (name, said)
        assert "→" in said, (name, said)
        assert loaded == [], name
    assert not Path(f"{out}-new").exists()
