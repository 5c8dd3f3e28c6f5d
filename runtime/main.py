"""What ``spark-submit`` runs: starts a session. Alone in its folder, which spark-submit puts on the path first."""

from ckpt_runtime.spark.session import main

if __name__ == "__main__":
    main()
