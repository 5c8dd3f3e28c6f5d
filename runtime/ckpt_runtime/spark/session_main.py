"""The file that ``spark-submit`` runs if the package is installed and there is no ``main.py`` of a source tree.

spark-submit puts this file's folder first on the path. That is undone before anything is imported, because a module of
this folder must never shadow one of the standard library.
"""

import sys
from pathlib import Path

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

if __name__ == "__main__":
    from ckpt_runtime.spark.installation import check_runtime

    check_runtime()

    from ckpt_runtime.spark.session import main

    main()
