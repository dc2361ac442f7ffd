"""Which scheduling policy should be active, and was the last switch a mistake? (H-MAS 3.4.1, App. C)

A selector (`selectors`; `rules` is the default) proposes a policy from the quality of service that engines delivered.
`guards` decides whether a proposal, a bypass (`emergency`) or a rollback (`switch_regret`) takes effect. `steering_loop`
collects reports into observations and asks them. All of it is pure: the operator and `tidegate up` supply reports and the
time, and set the verdict on engines.
"""
