"""Azurite, Microsoft's emulator of Azure's blob storage, with state in memory."""

from __future__ import annotations

import contextlib
from typing import Any

from servers.process import Server

ACCOUNT = "devstoreaccount1"  # Azurite's built-in account and public key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Azurite(Server):
    def _start(self) -> None:
        port = str(self.port)
        self.spawn(
            "azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", port, "--inMemoryPersistence", "--silent",
            "--disableTelemetry", "--skipApiVersionCheck",
        )  # fmt: skip

    @property
    def storage_options(self) -> dict[str, Any]:
        where = f"BlobEndpoint={self.url}/{ACCOUNT};"
        return {"connection_string": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{where}"}

    @property
    def client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        words = self.storage_options["connection_string"]
        return BlobServiceClient.from_connection_string(words, retry_total=0, connection_timeout=5, read_timeout=30)

    def make_bucket(self, name: str) -> str:
        with self.client as client:
            client.create_container(name)
        return name

    def _answers(self) -> bool:
        from azure.core.exceptions import AzureError

        with contextlib.suppress(AzureError), self.client as client:
            list(client.list_containers())
            return True
        return False
