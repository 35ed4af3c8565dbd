"""`featviz completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print a script with which a shell completes commands, options and names.

    MODEL and --arch complete the names of torchvision's models and paths,
    --layers the names of classes. Put the script where the shell reads it.

    \b
    bash, with the package bash-completion:
      featviz completion bash > ~/.local/share/bash-completion/completions/featviz
    bash without it, in ~/.bashrc:
      eval "$(featviz completion bash)"
    zsh, with fpath+=~/.zfunc; autoload -Uz compinit && compinit in ~/.zshrc:
      featviz completion zsh > ~/.zfunc/_featviz
    fish:
      featviz completion fish > ~/.config/fish/completions/featviz.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    output.text(kind(root.command, {}, "featviz", "_FEATVIZ_COMPLETE").source())
    return 0
