"""Messages between ranks: groups, collectives, agreement, failures, streams, workers and rates."""
