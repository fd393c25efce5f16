"""AES-128-GCM of OpenSSL's libcrypto, by its exported functions.

CPython's ``ssl`` module links libcrypto, so nearly every installation has it.  ``addresses`` gives
the same functions to compiled code.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from typing import Any

from miraccl.errors import MissingDependency

TAG_BYTES = 16
#: Numbers of ``openssl/evp.h``: EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG.
GET_TAG, SET_TAG = 0x10, 0x11
_NAMES = (
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_CIPHER_CTX_ctrl",
    "EVP_aes_128_gcm",
    "EVP_EncryptInit_ex",
    "EVP_EncryptUpdate",
    "EVP_EncryptFinal_ex",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_DecryptFinal_ex",
)


@functools.cache
def libcrypto() -> ctypes.CDLL:
    """Return OpenSSL's libcrypto, version 1.1 or newer.

    Raises:
        MissingDependency: No such library is installed.
    """
    names = [ctypes.util.find_library("crypto"), "libcrypto.so.3", "libcrypto.so.1.1"]
    for name in filter(None, names):
        try:
            library = ctypes.CDLL(name)
            for function in _NAMES:
                getattr(library, function)
        except (OSError, AttributeError):
            continue
        for function in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
            getattr(library, function).restype = ctypes.c_void_p
        return library
    raise MissingDependency(
        "cannot protect packets: OpenSSL's libcrypto is not installed",
        hint="install the package openssl, or set MIRACCL_NET=tcp",
    )


@functools.cache
def addresses() -> dict[str, int]:
    """Return the address of each function that compiled code calls."""
    library = libcrypto()
    return {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES
    }


class AesGcm:
    """AES-128-GCM with one key (NIST SP 800-38D). Not thread-safe.

    Args:
        key: 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 16:
            raise ValueError(f"a key of {len(key)} bytes; AES-128 takes 16")
        self._library = libcrypto()
        self._key = key
        self._context = ctypes.c_void_p(self._library.EVP_CIPHER_CTX_new())
        self._length = ctypes.c_int()

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context:
            self._library.EVP_CIPHER_CTX_free(context)

    def prepared(self, *, sealing: bool) -> int:
        """Return the address of the context with cipher and key, for compiled code that sets
        nonces only.
        """
        cipher = ctypes.c_void_p(self._library.EVP_aes_128_gcm())
        direction = "Encrypt" if sealing else "Decrypt"
        self._call(f"EVP_{direction}Init_ex", cipher, None, self._key, None)
        return self._context.value or 0

    def seal(self, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return the ciphertext followed by the tag of 16 bytes."""
        out, tag = ctypes.create_string_buffer(len(plain)), ctypes.create_string_buffer(TAG_BYTES)
        self._run("Encrypt", nonce, aad, plain, out)
        final = ctypes.create_string_buffer(TAG_BYTES)
        self._call("EVP_EncryptFinal_ex", final, ctypes.byref(self._length))
        self._call("EVP_CIPHER_CTX_ctrl", GET_TAG, TAG_BYTES, tag)
        return out.raw[: len(plain)] + tag.raw

    def open(self, nonce: bytes, aad: bytes, sealed: bytes) -> bytes | None:
        """Return the plaintext, or None if the tag does not match."""
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        out, final = ctypes.create_string_buffer(len(body)), ctypes.create_string_buffer(TAG_BYTES)
        self._run("Decrypt", nonce, aad, body, out)
        self._call("EVP_CIPHER_CTX_ctrl", SET_TAG, TAG_BYTES, tag)
        finish = self._library.EVP_DecryptFinal_ex
        if finish(self._context, final, ctypes.byref(self._length)) != 1:
            return None
        return out.raw[: len(body)]

    def _run(self, direction: str, nonce: bytes, aad: bytes, data: bytes, out: Any) -> None:
        cipher = ctypes.c_void_p(self._library.EVP_aes_128_gcm())
        self._call(f"EVP_{direction}Init_ex", cipher, None, self._key, nonce)
        update = f"EVP_{direction}Update"
        if aad:
            self._call(update, None, ctypes.byref(self._length), aad, len(aad))
        if data:
            self._call(update, out, ctypes.byref(self._length), data, len(data))

    def _call(self, name: str, *args: Any) -> None:
        if getattr(self._library, name)(self._context, *args) != 1:
            raise RuntimeError(f"{name} failed")
