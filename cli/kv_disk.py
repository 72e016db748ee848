"""`wicore kv inspect`, `verify` and `purge`: the directory of a disk tier, without a server."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from wicore_trt.kv.disk.tools import DirectoryReport

DirectoryArgument = Annotated[Path, Argument(help="Directory of the disk tier (kv.disk_path).")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]


def inspect(path: DirectoryArgument, json: JsonOption = False) -> None:
    """Show what a disk cache holds: namespaces, pages, bytes, tenants. Only reads, also while a server runs."""
    from dataclasses import asdict

    from wicore_trt.cli._ui import print_json
    from wicore_trt.kv.disk.tools import inspect_directory, list_tiers

    reports = [inspect_directory(home) for home in list_tiers(path)]
    if json:
        found = [asdict(report) for report in reports]
        print_json(found[0] if len(found) == 1 else {"path": str(path), "replicas": found})
    else:
        for report in reports:
            _print_directory(report)


def verify(
    path: DirectoryArgument,
    key_file: Annotated[
        Path | None, Option(help="Key of encrypted pages; without it their tags are not checked.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Report damage, but leave everything as it is.")] = False,
    json: JsonOption = False,
) -> None:
    """Read and check every page of a disk cache, and take damaged ones out. No server may use it meanwhile.

    Exit code 0: all is well; 1: something was damaged; 3: the key is wrong; 4: a server holds the directory.
    """
    from wicore_trt.cli._ui import human_bytes, print_json, print_table, progress
    from wicore_trt.kv.disk.cipher import PageCipher, load_key_file
    from wicore_trt.kv.disk.tools import add_reports, list_tiers, verify_directory

    cipher = PageCipher(load_key_file(key_file)) if key_file is not None else None
    with progress(quiet=json) as report_progress:
        verify_tier = partial(verify_directory, cipher=cipher, dry_run=dry_run, progress=report_progress)
        report = add_reports(list(map(verify_tier, list_tiers(path))))
    if json:
        print_json({"path": str(path), "dry_run": dry_run, **vars(report)})
    else:
        rows: list[tuple[Any, ...]] = [("pages read", report.pages), ("good", report.good)]
        rows += [("of them encrypted, tag not checked (--key-file)", report.unopened)] if report.unopened else []
        rows += [(f"damaged: {cause}", count) for cause, count in report.faults.most_common()]
        rows += [("pages that were being written", report.leftovers), ("records cleared", report.erased_records)]
        print_table(f"{path}: {human_bytes(report.bytes)} read", ("", "count"), rows)
    if report.faults:
        raise typer.Exit(1)


def purge(
    path: DirectoryArgument,
    namespace: Annotated[str | None, Option(help="Only this namespace: its name, or how that begins.")] = None,
    salt: Annotated[
        str | None, Option(help="Only pages of requests with this cache_salt, on a server without tenants.")
    ] = None,
    tenant_name: Annotated[str | None, Option(help="Only this tenant, by its name in the server's settings.")] = None,
    tenant: Annotated[str | None, Option(help="Only this tenant, by its tag from inspect.")] = None,
    recipe: Annotated[
        str | None, Option(help="The server's recipe, for kv.salt; or set WICORE_KV__SALT as it does.")
    ] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the pages of a disk cache: all, or those of a namespace or a tenant. No server may use it meanwhile.

    A tenant's slots are overwritten with zeros, also those of pages that were evicted earlier.
    """
    from dataclasses import asdict

    from wicore_trt.cli._ui import human_bytes, print_json
    from wicore_trt.errors import ConfigError
    from wicore_trt.kv.disk.tools import add_reports, list_namespaces, list_tiers, purge_directory
    from wicore_trt.kv.pages.page import TENANT_BYTES

    if sum(given is not None for given in (salt, tenant_name, tenant)) > 1:
        raise ConfigError("--salt, --tenant-name and --tenant each name a tenant.", fix="Give one of them.")
    homes = list_tiers(path)
    list_namespaces(homes[0])  # not a disk cache: say so before asking
    if salt is not None or tenant_name is not None:
        tags: list[bytes] | None = _find_tags(homes, recipe, tenant_name or "", salt or "")
    elif tenant is not None:
        tags = [bytes.fromhex(tenant)] if re.fullmatch(f"[0-9a-fA-F]{{{2 * TENANT_BYTES}}}", tenant) else []
        if not tags:
            fix = f"It has {2 * TENANT_BYTES} hexadecimal digits; see wicore kv inspect."
            raise ConfigError(f"--tenant {tenant!r} is not a tenant's tag.", fix=fix)
    else:
        tags = None
    if not yes:
        what = "everything" if namespace is None else f"namespace {namespace}"
        what = f"one tenant's pages in {what}" if tags is not None else what
        try:
            wanted = typer.confirm(f"Delete {what} under {path}?", err=True)
        except typer.Abort:
            print(file=sys.stderr)  # behind the question
            raise ConfigError("Nobody answered, and nothing was deleted.", fix="Give --yes.") from None
        if not wanted:
            print("Nothing was deleted.")
            raise typer.Exit(1)
    report = add_reports(
        [purge_directory(home, namespace=namespace, tenant=tag) for home in homes for tag in tags or (None,)]
    )
    if json:
        print_json({"path": str(path), **asdict(report)})
        return
    how = "overwritten" if tags is not None else "deleted"
    print(f"Removed {report.pages} pages ({human_bytes(report.bytes)}); {report.slots} slots {how}.")
    for name in report.namespaces:
        print(f"  in namespace {name}")


def _find_tags(homes: Sequence[Path], recipe: str | None, who: str, salt: str) -> list[bytes]:
    """Compute a tenant's tags from the server's secret: that of its setting kv.salt, or those in its disk directories,
    which differ where one served alone before replicas did, or after them."""
    from wicore_trt.config import load_settings
    from wicore_trt.errors import ConfigError, EnvironmentUnfitError
    from wicore_trt.kv.disk.claim import derive_secret, read_secret
    from wicore_trt.kv.disk.tools import open_as_owner
    from wicore_trt.kv.pages.hashing import tenant_tag

    setting = load_settings(recipe).kv.salt
    try:
        found = [derive_secret(setting)] if setting is not None else [read_secret(open_as_owner(p), p) for p in homes]
    except OSError as error:
        fix = "Run this as the user of the server, and remove what is not the server's."
        raise EnvironmentUnfitError(f"{error.filename or homes[0]}: {error.strerror}.", fix=fix) from error
    if not (known := {secret for secret in found if secret is not None}):
        fix = "Set WICORE_KV__SALT as for the server, or give the tag that `wicore kv inspect` prints: --tenant."
        raise ConfigError(f"{homes[0]} holds no secret, and kv.salt is not set: no tag can be made.", fix=fix)
    return [tenant_tag(secret, who, salt) for secret in sorted(known)]


def _print_directory(report: DirectoryReport) -> None:
    from wicore_trt.cli._ui import human_bytes, print_table

    print(f"{report.path}: {human_bytes(report.total_bytes)} on disk")
    if report.used_by is not None:
        print(f"In use by process {report.used_by or '(of another container)'}: numbers may be in motion.")
    for found in report.namespaces:
        print()
        if found.problem is not None:
            print(f"Namespace {found.name} cannot be used: {found.problem}")
            continue
        rows: list[tuple[Any, ...]] = [(name, value) for name, value in found.made_for.items() if name != "layout"]
        rows += [
            ("slots used", f"{found.used_slots} of {found.allocated_slots}"),
            ("bytes used", human_bytes(found.used_slots * found.slot_bytes)),
            ("bytes allocated", human_bytes(found.allocated_bytes)),
            ("encrypted pages", f"{found.encrypted_pages} of {found.pages}"),
            ("written by servers started", f"{_format_time(found.oldest)} to {_format_time(found.newest)}"),
        ]
        print_table(f"Namespace {found.name}", ("made for", ""), rows)
        groups = [(name, use.pages, human_bytes(use.bytes)) for name, use in found.groups.items()]
        print_table("Layer groups", ("group", "pages", "bytes"), groups)
        tenants = sorted(found.tenants.items(), key=lambda item: -item[1].bytes)
        by_tag = [(tag, use.pages, human_bytes(use.bytes)) for tag, use in tenants]
        print_table("Tenants", ("tag", "pages", "bytes"), by_tag)


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
