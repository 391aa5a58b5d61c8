"""Commands of ``twinkle-server`` for operators, one a module. Each adds its parser and runs what was asked."""
