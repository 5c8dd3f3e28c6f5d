"""Mutual authentication of a new connection with a shared secret. Pure: the callers send and receive.

Both sides send 32 random bytes; each proves knowledge of the secret by an HMAC-SHA256 over its role and both nonces. A
replayed or reflected proof fails, since it depends on role and nonces. The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32
_PREFACE = b"CKPT1"
PREFACE_BYTES = len(_PREFACE) + NONCE_BYTES


class AuthenticationError(ConnectionError):
    """The peer does not know the secret, or does not speak this protocol."""


def new_secret() -> str:
    """A new application secret: 256 random bits as hex."""
    return secrets.token_hex(32)


class Handshake:
    """One side of a handshake. ``role`` is ``"client"`` (connects) or ``"server"``; ``purpose`` names the protocol."""

    def __init__(self, secret: str, role: str, purpose: str) -> None:
        self._secret = secret.encode()
        self._role = role
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def preface(self) -> bytes:
        """The PREFACE_BYTES bytes that this side sends first."""
        return _PREFACE + self._nonce

    def proof(self, peer_preface: bytes) -> bytes:
        """The PROOF_BYTES bytes that this side sends second. Raises AuthenticationError for a foreign preface."""
        return self._mac(self._role, self._peer_nonce(peer_preface))

    def verify(self, peer_preface: bytes, peer_proof: bytes) -> None:
        """Raises AuthenticationError unless the peer knows the secret and has the other role."""
        other = "server" if self._role == "client" else "client"
        if not hmac.compare_digest(self._mac(other, self._peer_nonce(peer_preface)), peer_proof):
            raise AuthenticationError("the peer does not know this application's secret")

    def _mac(self, role: str, peer_nonce: bytes) -> bytes:
        mine_is_client = self._role == "client"
        client, server = (self._nonce, peer_nonce) if mine_is_client else (peer_nonce, self._nonce)
        message = b"|".join([self._purpose.encode(), role.encode(), client, server])
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    @staticmethod
    def _peer_nonce(peer_preface: bytes) -> bytes:
        if len(peer_preface) != PREFACE_BYTES or not peer_preface.startswith(_PREFACE):
            raise AuthenticationError("the peer does not speak this protocol")
        return peer_preface[len(_PREFACE) :]
