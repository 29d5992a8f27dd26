"""What the package and its extras require, for `pip install -r`.

python tests/project/requirements.py [LEFT OUT ...]
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_INSTALLED = ("flash", "quantized", "ray")  # extras that `make install` leaves out


def requirements(left_out: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [extras[name] for name in extras if name not in NOT_INSTALLED]
    found = sorted({one for part in (project["dependencies"], *chosen) for one in part})
    without = {"medusa-kit", *left_out}
    return [one for one in found if re.split(r"[^\w.-]", one)[0] not in without]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
