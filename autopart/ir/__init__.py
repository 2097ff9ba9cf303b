"""The intermediate representations: frozen data, their text forms and verifiers."""
