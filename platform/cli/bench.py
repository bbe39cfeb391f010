import typer
app = typer.Typer()
@app.command()
def throughput() -> None:
    """x"""
