"""Certificates for tests: an authority, and what it signs for hosts."""

import datetime
import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rl.host_tls import VARIABLES

_DAY = datetime.timedelta(days=1)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these of RL_TLS_* alone."""
    before = {name: os.environ.pop(name, None) for name in VARIABLES}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Authority:
    """It writes PEM files into its directory."""

    def __init__(self, directory: Path, name: str = "authority"):
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        whose = x509.BasicConstraints(ca=True, path_length=None)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(
            _pem(self._builder(self._name, self._key).add_extension(whose, True), self._key)
        )

    def variables(self, name: str, addresses: Sequence[str], passphrase: bytes = b"") -> dict[str, str]:
        """What a host with these addresses has in its environment. passphrase: of its key; empty: none."""
        key, cert = self._directory / f"{name}.key", self._directory / f"{name}.pem"
        own = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        )
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = self._builder(_name(name), own).add_extension(names, False).add_extension(uses, False)
        cert.write_bytes(_pem(builder, self._key))
        locked = (
            serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        )
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked
        key.write_bytes(own.private_bytes(*form))
        return {"RL_TLS_CERT": str(cert), "RL_TLS_KEY": str(key), "RL_TLS_CA": str(self.file)}

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
