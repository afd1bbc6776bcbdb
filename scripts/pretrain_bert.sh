#!/usr/bin/env bash
# Installs hybridpar, prepares real text, and pretrains a BERT on the grid that is fastest on this machine, with PipeDream-2BW
# where that gains 5 %.
#
#   bash scripts/pretrain_bert.sh                                     minutes on 2 CPU cores
#   TP=2 PP=2 DP=2 bash scripts/pretrain_bert.sh                      a grid of your own; the planner keeps what you give
#   CONFIG=scripts/configs/bert_large.toml PP=4 bash scripts/pretrain_bert.sh --train.num_steps 1000
#
# Stop it with Ctrl-C; the same command goes on from the last checkpoint. The grid's variables: scripts/launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source scripts/launch.sh
[ -n "${CONFIG:-}" ] || BATCH="${BATCH:-32}"
launch "${CONFIG:-scripts/configs/bert_tiny.toml}" "$@"
