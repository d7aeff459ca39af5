"""The settings of a server, besides those of its engine."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hardpoint_plugin_api import ConfigError

DEFAULT_PORT = 8000
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s?#@A-Z]+")
"""RFC 6454, section 6.2; a path, or a slash at the end, would never match."""
_ENDPOINT = re.compile(r"https?://[^/\s]+/\S+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True)
class TlsSettings:
    """The files and rules by which connections are encrypted. ``keyfile`` None: the key is in ``certfile``.

    ``cert_reqs``: whether clients need a certificate (0: no, 1: they may have one, 2: yes), by one of ``ca_certs``.
    ``ciphers``: OpenSSL's list of ciphers for TLS 1.2; None: Python's.
    """

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0
    ciphers: str | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS context of connections. Raises ConfigError, naming the flag."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            key = "" if self.keyfile is None else f" with --ssl-keyfile {self.keyfile}"
            raise ConfigError(f"--ssl-certfile {self.certfile}{key} cannot be used: {_said(error)}") from None
        if self.cert_reqs and self.ca_certs is None:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, by which clients' certificates are checked")
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--ssl-ca-certs {self.ca_certs} cannot be used: {_said(error)}") from None
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError as error:
                raise ConfigError(f"--ssl-ciphers {self.ciphers}: {_said(error)}") from None
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        return context


def _said(error: OSError) -> str:
    return error.strerror or str(error)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server, besides those of its engine.

    ``port`` 0: a free port. Without ``api_keys``, requests need no key. ``served_model_names``: names of the model in
    requests; responses have the first. ``max_concurrent_requests``: most open requests; one request may be several
    sequences of the engine. Times are in seconds: ``head_timeout`` for the headers of a request, ``body_timeout`` more
    for its body, ``write_timeout`` for a client that does not read its response, ``shutdown_deadline`` for open
    requests when the server is told to stop. ``allow_lora_updating``: clients may load LoRA adapters from the server's
    disk, and unload them. ``allow_engine_control``: clients may have the engine sleep, wake up and forget prefixes.
    ``log_requests``: the log has a line for each generation. ``strict_fields``: requests with unknown fields are
    refused. ``allowed_hosts``: names that a Host header may have. ``min_priority``: the lowest priority number, which
    runs first, that clients may give. ``tls``: how connections are encrypted; None: not at all. ``uds``: the path of a
    Unix socket to listen on, in place of host and port. ``root_path``: the path below which a proxy shows the server.
    ``api_server_count``: processes that answer HTTP and share one engine. One that does not react for ``api_timeout``
    seconds is replaced.
    ``mcp_allowed_hosts``: hosts (with a port or without) of tool servers that requests may name; ``mcp_timeout`` and
    ``mcp_max_bytes`` limit each of their answers.
    ``profile_folder``: where profiles that clients ask for are written. ``metrics_names``: vllm
    for metrics under vLLM's names beside our own. ``response_store``: the file for responses that are kept; None: a
    file that is gone with the server. ``response_store_bytes`` and ``response_store_hours`` say how many, and for how
    long since their last use; 0 bytes: none is kept. ``otlp_traces_endpoint``: the URL that gets a span for each
    generation.

    Raises ConfigError, naming the flag.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_concurrent_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
    shutdown_deadline: float = 30.0
    head_timeout: float = 20.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    access_log: bool = False
    allow_lora_updating: bool = False
    strict_fields: bool = False
    log_requests: bool = False
    allow_engine_control: bool = False
    allowed_hosts: tuple[str, ...] = ()
    min_priority: int = 0
    tls: TlsSettings | None = None
    uds: Path | None = None
    root_path: str = ""
    api_server_count: int = 1
    api_timeout: float = 30.0
    mcp_allowed_hosts: tuple[str, ...] = ()
    mcp_timeout: float = 60.0
    mcp_max_bytes: int = 2**20
    profile_folder: Path | None = None
    response_store: Path | None = None
    response_store_bytes: int = 2**28
    response_store_hours: float = 30 * 24.0
    otlp_traces_endpoint: str | None = None
    metrics_names: Literal["hardpoint", "vllm"] = "hardpoint"

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--port", self.port, 0, 65535),
            ("--max-concurrent-requests", self.max_concurrent_requests, 1, 10**6),
            ("--max-body-bytes", self.max_body_bytes, 1, 2**40),
            ("--shutdown-deadline", self.shutdown_deadline, 0, 86400),
            ("--head-timeout", self.head_timeout, 0.001, 86400),
            ("--body-timeout", self.body_timeout, 0.001, 86400),
            ("--write-timeout", self.write_timeout, 0.001, 86400),
            ("--response-store-bytes", self.response_store_bytes, 0, 2**50),
            ("--response-store-hours", self.response_store_hours, 0.001, 10**6),
            ("--api-server-count", self.api_server_count, 1, 256),
            ("--api-server-timeout", self.api_timeout, 1, 86400),
            ("--mcp-timeout", self.mcp_timeout, 0.001, 86400),
            ("--mcp-max-bytes", self.mcp_max_bytes, 1, 2**40),
            ("--min-priority", self.min_priority, -(2**31), 0),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{flag} {value} is invalid: must be from {low} to {high}")
        if self.allow_engine_control and not self.api_keys:
            raise ConfigError("--allow-engine-control needs --api-key or --api-key-file: else anybody stops the engine")
        if self.profile_folder is not None and not self.allow_engine_control:
            raise ConfigError("--profile-folder needs --allow-engine-control, with which clients take profiles")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path {self.root_path!r} is no path: write it with a slash in front and none behind, such as "
                "/llm"
            )
        if self.otlp_traces_endpoint is not None and not _ENDPOINT.fullmatch(self.otlp_traces_endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint {self.otlp_traces_endpoint!r}: spans go by HTTP; give the whole URL, such as "
                "http://127.0.0.1:4318/v1/traces"
            )
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable()) or key != key.strip() or not key:
                raise ConfigError("--api-key: a key is made of printable ASCII characters and has no blanks around it")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is no origin: write * or scheme, host and port as browsers send them, "
                    "such as https://page.example"
                )
        if any(not name for name in self.served_model_names):
            raise ConfigError("--served-model-name is empty; give the name that clients use")


def read_api_keys(file: Path) -> tuple[str, ...]:
    """The keys in ``file``, one a line; blank lines and those that begin with # are left out. Raises ConfigError."""
    try:
        lines: Iterable[str] = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise ConfigError(f"--api-key-file {file} cannot be read: {why}; give a text file of keys") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file: {file} holds no key; write one on each line, or leave the flag out")
    return keys
