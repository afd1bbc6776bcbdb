#!/usr/bin/env bash
# Installs hybridpar, prepares real text, and pretrains a BERT on a hybrid grid: 2 pipeline stages x 2 replicas, PipeDream-2BW.
#
#   bash scripts/pretrain_bert.sh                                     minutes on 2 CPU cores
#   TP=2 PP=2 DP=2 bash scripts/pretrain_bert.sh                      another grid
#   CONFIG=scripts/configs/bert_large.toml PP=4 bash scripts/pretrain_bert.sh --train.num_steps 1000
#
# Stop it with Ctrl-C; the same command goes on from the last checkpoint. The grid's variables: scripts/launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source scripts/launch.sh
TP="${TP:-1}" PP="${PP:-2}" DP="${DP:-2}" launch "${CONFIG:-scripts/configs/bert_tiny.toml}" "$@"
