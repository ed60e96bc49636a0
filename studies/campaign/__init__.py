"""The fault campaign: `trials` draws trials, `training` and `striking` run in the ranks, `supervisor` watches, `verdict` judges."""

from studies.campaign.command import main as main
