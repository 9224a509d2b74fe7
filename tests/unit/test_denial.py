from __future__ import annotations

import pytest
from confluent_kafka import KafkaError as ClientError

from keylane.denial import broker_error, is_denied
from keylane.errors import AccessDeniedError, BrokerError
from keylane.rights import Operation, on_group, on_topic, on_transactional_ids

RIGHTS = (
    on_topic("receipts", Operation.WRITE),
    on_group("shop", Operation.READ),
    on_transactional_ids("shop"),
)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (ClientError.TOPIC_AUTHORIZATION_FAILED, "Allow this user Write on topic 'receipts'"),
        (ClientError.GROUP_AUTHORIZATION_FAILED, "Allow this user Read on group 'shop'"),
        (
            ClientError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "Allow this user Write on transactional ids that begin with 'shop.'",
        ),
        (ClientError.CLUSTER_AUTHORIZATION_FAILED, "Allow this user to do that"),
        (ClientError.SASL_AUTHENTICATION_FAILED, "Check kafka.sasl.mechanism"),
        (ClientError._AUTHENTICATION, "Check kafka.sasl.mechanism"),
    ],
)
def test_denied_right_is_named(code: int, said: str) -> None:
    error = broker_error("not committed", ClientError(code, "denied."), *RIGHTS)
    assert isinstance(error, AccessDeniedError)
    assert str(error).startswith("not committed: denied. ")
    assert said in str(error)


def test_other_errors_are_not_denials() -> None:
    error = broker_error("not committed", ClientError(ClientError._TIMED_OUT, "timed out"), *RIGHTS)
    assert type(error) is BrokerError
    assert str(error) == "not committed: timed out"
    assert not is_denied("message too large")
