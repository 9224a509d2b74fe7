from __future__ import annotations

from pathlib import Path

from keylane.rights import Operation, ResourceKind, app_rights, operator_rights, rights_table

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


def test_documented_table_is_the_one_of_the_code() -> None:
    assert rights_table() in OPERATIONS.read_text(encoding="utf-8"), "print(keylane.rights.rights_table())"


def test_app_without_sink_and_ledger_needs_neither() -> None:
    names = {right.name for right in app_rights("shop", "orders", [], ledger=False)}
    assert names == {"orders", "shop.state", "shop.dlq", "shop.telemetry", "shop", "shop."}


def test_operator_writes_only_the_state_topic() -> None:
    rights = operator_rights("shop", "orders", ["receipts"], ledger=True)
    assert [r.name for r in rights if r.operation is Operation.WRITE] == ["shop.state"]
    assert not [r for r in rights if r.kind is ResourceKind.TRANSACTIONAL_ID]


def test_only_the_prefix_of_transactional_ids_is_open() -> None:
    rights = app_rights("shop", "orders", ["receipts"], ledger=True)
    assert {right.name for right in rights if right.prefix} == {"shop."}
    assert {right.kind for right in rights if right.prefix} == {ResourceKind.TRANSACTIONAL_ID}
