"""EngineControl, the gRPC service that every engine offers to its operator and to gateways.

`control_contract` defines the values of the service and the protocol that an engine implements, `control_server` serves
such an engine, `control_client` calls the service over a `grpc_channel`, `control_connections` follows a set of engines,
and `translation` converts between messages and values. The meaning of a report is in `tidegate_policy.qos`; the decision
about a policy is in `tidegate_policy.steer`. Both gateways and operators write their logs by `log_lines` and `log_output`.
"""
