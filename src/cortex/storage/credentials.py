"""Settings of object stores from environment variables and AWS's files, as the providers' own tools read them.

obstore's own providers cannot replace this: those in obstore itself ignore AWS's profile files, and the others need
boto3 or google-auth. The only request made here finds the region of a bucket.
"""

from __future__ import annotations

import configparser
import functools
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

#: Key of the store's configuration → environment variables; the first one that is set wins.
_AWS_VARIABLES = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "virtual_hosted_style_request": ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST",),
    "request_payer": ("AWS_REQUEST_PAYER",),
    "role_arn": ("AWS_ROLE_ARN",),
    "web_identity_token_file": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    "container_credentials_relative_uri": ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    "container_credentials_full_uri": ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    "container_authorization_token_file": ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",),
}
_UNSIGNED_VARIABLES = ("AWS_SKIP_SIGNATURE", "AWS_NO_SIGN_REQUEST")
#: Keys that select credentials of the runtime environment.
_ROLE_KEYS = frozenset(
    {"web_identity_token_file", "container_credentials_relative_uri", "container_credentials_full_uri"}
)
_DEFAULT_REGION = "us-east-1"
_REGION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StoreSettings:
    """Client settings of a bucket. `may_be_unsigned`: no credentials are configured, so the bucket may be public."""

    config: dict[str, str] = field(default_factory=dict)
    allow_http: bool = False
    may_be_unsigned: bool = False

    def unsigned(self) -> StoreSettings:
        """Return the settings for a public bucket."""
        return StoreSettings({**self.config, "skip_signature": "true"}, self.allow_http)


def s3_settings(bucket: str, environ: Mapping[str, str]) -> StoreSettings:
    """Return the settings for an S3 bucket: from the environment, then from AWS's files.

    Queries S3 for the bucket's region if none is configured.
    """
    config = _aws_files(environ)
    if any(environ.get(name) for name in _AWS_VARIABLES["access_key_id"]):
        # Credentials belong together: never combine a key of the environment with a token of the file.
        config = {key: value for key, value in config.items() if key in ("region", "endpoint")}
    for key, names in _AWS_VARIABLES.items():
        if value := next((environ[name] for name in names if environ.get(name)), None):
            config[key] = value
    if any(environ.get(name, "").lower() in ("1", "true", "yes") for name in _UNSIGNED_VARIABLES):
        config["skip_signature"] = "true"
    has_key = "access_key_id" in config
    is_known = has_key or "skip_signature" in config or bool(_ROLE_KEYS & config.keys())
    endpoint = config.get("endpoint", "")
    if not is_known and (endpoint or environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"):
        # Instance credentials exist on AWS's own machines only.
        config["skip_signature"], is_known = "true", True
    if "region" not in config:
        config["region"] = _DEFAULT_REGION if endpoint else bucket_region(f"https://{bucket}.s3.amazonaws.com")
    return StoreSettings(config, endpoint.startswith("http://"), not is_known)


def gs_settings(environ: Mapping[str, str]) -> StoreSettings:
    """Return the settings for a bucket of Google Cloud Storage, or of its emulator."""
    emulator = environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        base = emulator if "://" in emulator else f"http://{emulator}"
        account = {"gcs_base_url": base.rstrip("/"), "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        return StoreSettings({"service_account_key": key}, base.startswith("http://"))
    credentials = environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if credentials:
        return StoreSettings({"application_credentials": credentials})
    own = Path(environ.get("HOME", "~")).expanduser() / ".config/gcloud/application_default_credentials.json"
    return StoreSettings({"application_credentials": str(own)} if own.is_file() else {}, False, not own.is_file())


def bucket_region(url: str) -> str:
    """Return the region of a bucket from S3, which answers even without permission to read it."""
    try:
        return _query_region(url)
    except LookupError:
        return _DEFAULT_REGION


@functools.cache
def _query_region(url: str) -> str:
    """Query the region once and cache it, as it never changes. Raises: LookupError, uncached, if there is no answer."""
    request = urllib.request.Request(url, method="HEAD")
    headers: Mapping[str, str] = {}
    try:
        with urllib.request.urlopen(request, timeout=_REGION_TIMEOUT_S) as answer:
            headers = dict(answer.headers.items())
    except urllib.error.HTTPError as error:
        headers = dict(error.headers.items())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LookupError(url) from error
    return {name.lower(): value for name, value in headers.items()}["x-amz-bucket-region"]


def endpoint_name(settings: StoreSettings, scheme: str) -> str:
    """Return the name of the store's endpoint for messages."""
    endpoint = settings.config.get("endpoint") or json.loads(settings.config.get("service_account_key", "{}")).get(
        "gcs_base_url"
    )
    return urlsplit(endpoint).netloc if endpoint else {"s3": "S3", "gs": "Google Cloud Storage"}.get(scheme, scheme)


def _aws_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the profile of AWS's credentials and configuration files."""
    profile = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    folder = Path(environ.get("HOME", "~")).expanduser() / ".aws"
    credentials = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials").expanduser()
    configuration = Path(environ.get("AWS_CONFIG_FILE") or folder / "config").expanduser()
    found: dict[str, str] = {}
    for file, section in ((configuration, f"profile {profile}"), (configuration, profile), (credentials, profile)):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if parser.has_section(section):
            found |= dict(parser.items(section))
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    return {names[key]: value for key, value in found.items() if key in names and value}
