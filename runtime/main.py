"""The script that ``spark-submit`` runs: starts a session. Alone in its folder, which spark-submit puts on the path
first.
"""

from ckpt_runtime.spark.installation import check_runtime

if __name__ == "__main__":
    check_runtime()

    from ckpt_runtime.spark.session import main

    main()
