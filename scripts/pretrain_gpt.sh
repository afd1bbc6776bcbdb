#!/usr/bin/env bash
# Installs hybridpar, prepares real text, and pretrains a GPT on the grid that is fastest on this machine, with PipeDream-2BW
# where that gains 5 %.
#
#   bash scripts/pretrain_gpt.sh                                     minutes on 2 CPU cores
#   TP=2 PP=2 DP=2 bash scripts/pretrain_gpt.sh                      a grid of your own; the planner keeps what you give
#   CONFIG=scripts/configs/gpt_345m.toml PP=4 bash scripts/pretrain_gpt.sh --train.num_steps 1000
#
# Stop it with Ctrl-C; the same command goes on from the last checkpoint. The grid's variables: scripts/launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source scripts/launch.sh
[ -n "${CONFIG:-}" ] || BATCH="${BATCH:-16}"
launch "${CONFIG:-scripts/configs/gpt_tiny.toml}" "$@"
