"""What a run leaves behind, and everything that is read from it: journal, metrics, report, replay."""
