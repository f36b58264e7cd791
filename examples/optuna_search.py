"""Optuna searches the rates. Runs that fall behind the others at an evaluation are stopped."""

import optuna

import partwise as pw

task = pw.load_task("planted", num_clients=300, num_items=60)


def objective(trial: optuna.Trial) -> float:
    """Train with the rates that Optuna suggests, and return the RMSE of the validation clients."""

    def follow(status) -> None:  # called after every compiled call and every evaluation
        if status.evaluation:
            trial.report(status.evaluation["rmse"], status.round)
            if trial.should_prune():
                raise optuna.TrialPruned

    rates = {key: trial.suggest_float(key, 0.03, 1, log=True) for key in ("server.rate", "update.rate")}
    run = pw.train(task, rounds=60, simulation__evaluate_every=20, progress=follow, changes=rates)
    return run.records[-1]["evaluation"]["rmse"]


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
)
study.optimize(objective, n_trials=6, catch=pw.UserError)  # a run that diverges is a failed trial

pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
print(f"best validation RMSE: {study.best_value:.4f} with {study.best_params}; {pruned} of 6 stopped early")
