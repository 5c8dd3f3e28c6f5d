"""The distribution ckpt-runtime: the stream engine, its client and its command line, without Airflow."""

from pathlib import Path

from setuptools import find_packages, setup

# What the client and the command line need. Sessions need the extra "session" too.
INSTALL_REQUIRES = [
    "fsspec>=2024.12.0",  # pipe_file(mode="create")
    "httpx>=0.27",
    "msgspec>=0.19",
    "orjson>=3.10",
    "rich>=13.8",
    "tenacity>=8.3",
    "typer>=0.15",
    "xxhash>=3.4",
]

EXTRAS_REQUIRE = {
    # Spark, and the engine's server and kernels, wherever sessions run: spark/installation.py checks for them.
    "session": [
        "fastapi>=0.115",
        "msgspec>=0.19",
        "numba>=0.61",
        "numpy>=2.0",
        "prometheus-client>=0.21",
        "pyarrow>=18.0.0",
        "pydantic>=2.9",
        "pyspark[connect]>=4.3,<4.4",  # PySpark's own classes build the plans of programs, and need gRPC's types for it
        "python-multipart>=0.0.18",
        "uvicorn>=0.30",
        "zstandard>=0.23",
    ],
    # The state backend of that name.
    "rocksdb": ["rocksdict>=0.3.29"],
    # The source and the sink of that name.
    "delta": ["deltalake>=1.6"],
    # The source and the sink of that name.
    "kafka": ["confluent-kafka>=2.10"],
    # The functions from_avro and to_avro.
    "avro": ["fastavro>=1.9"],
    # The functions from_protobuf and to_protobuf.
    "protobuf": ["protobuf>=6.31"],
    # The functions aes_encrypt, aes_decrypt and try_aes_decrypt.
    "aes": ["cryptography>=43"],
    # The functions and aggregates of HyperLogLog, theta and KLL sketches.
    "sketches": ["datasketches>=5.2"],
    # The source and the sink "postgresql".
    "postgres": ["psycopg[binary]>=3.2"],
    # A release of s3fs works with the very same release of fsspec only.
    "s3": ["s3fs>=2024.12.0"],
}

setup(
    name="ckpt-runtime",
    version="0.1.0",
    description="Checkpointed stream processing on Spark, with a Flink-compatible REST API",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The airflow-provider-ckpt developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["ckpt_runtime", "ckpt_runtime.*", "pyspark_ckpt"]),
    py_modules=[],  # main.py is for a source tree
    package_data={
        "ckpt_runtime": ["py.typed"],
        "ckpt_runtime.rest": ["*.json"],
        "ckpt_runtime.web": ["static/*"],
        "pyspark_ckpt": ["py.typed"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["ckpt=ckpt_runtime.cli.main:entry_point"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
