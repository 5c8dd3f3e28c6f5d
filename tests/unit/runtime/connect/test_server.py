"""The gRPC endpoint by itself: its address, TLS and the token, without Spark and without jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.connect.server import ConnectServer
from ckpt_runtime.frontend.spark_connect import SparkService
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from tests.support.certificates import Authority

SPARK_VERSION = "/spark.connect.SparkConnectService/GetStatus"


def no_spark() -> SparkService:
    raise RuntimeError("Spark was asked")


def server(token: str | None = "secret", **options: str) -> ConnectServer:
    configuration = {"connect.port": "0", **{key.replace("__", "."): value for key, value in options.items()}}
    return ConnectServer(cast(Dispatcher, None), Configuration(configuration), token, no_spark)


async def outcome(channel: Any, token: str) -> tuple[Any, str]:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary(SPARK_VERSION)(b"", metadata=(("authorization", f"Bearer {token}"),))
    return error.value.code(), error.value.details()


async def test_call_reaches_spark_with_the_token_only() -> None:
    started = server()
    port = await started.start("127.0.0.1")
    try:
        code, _ = await outcome(grpc.aio.insecure_channel(f"127.0.0.1:{port}"), "wrong")
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, text = await outcome(grpc.aio.insecure_channel(f"127.0.0.1:{port}"), "secret")
        assert (code, text) == (grpc.StatusCode.INTERNAL, "RuntimeError: Spark was asked")
    finally:
        await started.stop()


async def test_endpoint_speaks_tls_with_the_certificate_of_the_rest_api(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = await asyncio.to_thread(authority.issue, "driver")
    options = {
        "security__ssl__rest__enabled": "true",
        "security__ssl__rest__certificate": str(issued.certificate),
        "security__ssl__rest__key-file": str(issued.key),
    }
    started = server(**options)
    port = await started.start("127.0.0.1")
    trusted = await asyncio.to_thread(authority.path.read_bytes)
    try:
        secure = grpc.aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(trusted))
        assert (await outcome(secure, "secret"))[1] == "RuntimeError: Spark was asked"
        plain = grpc.aio.insecure_channel(f"localhost:{port}")
        assert (await outcome(plain, "secret"))[0] is grpc.StatusCode.UNAVAILABLE
    finally:
        await started.stop()


async def test_port_that_is_taken_is_named_in_the_error() -> None:
    first = server()
    port = await first.start("127.0.0.1")
    second = server(connect__port=str(port))
    try:
        with pytest.raises(OSError, match=rf"connect\.port: 127\.0\.0\.1:{port} cannot be bound"):
            await second.start("127.0.0.1")
    finally:
        await second.stop()
        await first.stop()
