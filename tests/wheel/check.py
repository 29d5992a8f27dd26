"""`make test-wheel`: the newest wheel of dist/ in an environment of its own, without a compiler.

Every level of the kernels that this processor has must come from the wheel and give the tokens of
plain transformers. Dependencies are those of the environment that runs this; the package is not.

    python tests/wheel/check.py FOLDER
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(folder: Path) -> int:
    wheel = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    print(wheel.name)
    if "-py3-none-manylinux_" not in wheel.name:
        print("this wheel has no kernels")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder.absolute() / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder.absolute())})
    # Lines of a .pth file come after the environment's own packages; the .pth files in that place,
    # which would bring the editable package, are not read.
    Path(paths["purelib"], "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {
        **{name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ},
        "PATH": str(python.parent),
        "CXX": "/nonexistent",
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder.absolute() / "extensions"),
        "MEDUSA_KIT_CACHE": str(folder.absolute() / "cache"),
    }
    script = Path(__file__).with_name("decode.py")
    return subprocess.run([python, script], env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
