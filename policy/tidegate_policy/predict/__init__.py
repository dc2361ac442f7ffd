"""What is not known of a call or an engine, predicted from what was observed.

Each predictor has `predict` and `observe`. Predictors are plain state without I/O, so the gateway and virtual time use the
same objects. `output_length` predicts sizes of calls, `engine_speed` the cost model of an engine without a profile,
`remaining_work` the work behind a stage of a workflow without a declaration.
"""
